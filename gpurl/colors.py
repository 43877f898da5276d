"""The colours of gpurl's pictures: curves, and videos of tasks."""

BLUE = "#2463c2"
ORANGE = "#e07b00"
GREEN = "#1a8f5a"
PURPLE = "#7b4fb8"
INK = "#333333"
GREY = "#8a8f98"
PALE = "#d9d9d9"
