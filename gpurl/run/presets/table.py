"""What presets are: settings by algorithm and environment."""

from gpurl.checkpoints.plain_files import Json

Preset = dict[str, Json]
# by algorithm and environment; "*": every environment, overridden by its own preset
Table = dict[tuple[str, str], Preset]
