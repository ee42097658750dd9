"""Plain PyTorch references that define the results of every op and decoder. They import nothing of pdkernels."""
