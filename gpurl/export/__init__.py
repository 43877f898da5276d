"""A trained policy as one file that acts without gpurl."""
