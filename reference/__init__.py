"""Plain PyTorch references: what every op and decoder must compute. Imports nothing of pdkernels."""
