"""What the extension modules were built against (written by setup.py)."""

TORCH_VERSION: str  # "2.14.1"
HAS_CUDA: bool  # torchpager._torch_cuda was built
CUDA_VERSION: str | None

def check_torch(version: str) -> None:
    """Raise ImportError if the extension modules cannot be loaded into torch `version`."""
