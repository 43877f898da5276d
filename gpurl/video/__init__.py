"""Videos of policies: pictures of their episodes, side by side, and the files that hold them."""
