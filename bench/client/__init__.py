"""Client against client on the same broker: ours, the stock Java one, the C++ one from PyPI."""
