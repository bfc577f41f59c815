"""The folder that ``torchpager run`` puts on the PYTHONPATH of child processes."""
