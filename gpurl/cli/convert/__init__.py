"""`gpurl convert`: weights of other trainers, without unpickling them in this process."""
