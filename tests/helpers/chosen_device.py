"""Chooses the tests' device, before anything imports mlx-lm: the CPU, on a Mac too.

Most tests promise bits, and CPU kernels keep that promise. A test of the GPU asks for it (`on_gpu`), and is
skipped without one.
"""

import mlx.core as mx

mx.set_default_device(mx.cpu)
