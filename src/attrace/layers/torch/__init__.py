"""The layers for PyTorch."""
