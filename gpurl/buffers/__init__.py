"""Where steps are kept until they are trained on."""
