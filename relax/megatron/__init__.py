"""The trainer's model: Megatron-Core networks, Hugging Face conversion, forward, backward and optimizer.

Importing anything of this package first prepares Megatron-Core for the device at hand (`relax.megatron.cpu`), which
must happen before the first `import megatron.core` of the process.
"""

from relax.megatron import cpu

cpu.enable()
