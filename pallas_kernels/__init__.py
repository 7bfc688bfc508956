"""Kernels, one file each: maths, reference, kernel, where it is supported, public op."""
