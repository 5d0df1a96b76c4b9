"""How pytest is told of the plugin where the package lies in a folder and is not installed."""

from __future__ import annotations

from importlib import metadata


def by_name() -> list[str]:
    """The options that name it; none where it is installed, since it may be registered only once."""
    installed = any(entry.name == "flashattn" for entry in metadata.entry_points(group="pytest11"))
    return [] if installed else ["-p", "pytest_flashattn.plugin"]
