"""Reference attention kernels (distribution: pytest-flashattn). None is bundled yet."""
