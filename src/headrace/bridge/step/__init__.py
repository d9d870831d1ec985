"""`hr.compile_step`: an ordinary PyTorch training step as one XLA program.

state.py     what the step owns, by name: parameters, buffers, optimizer state, hyperparameters
trace.py     one run on fake tensors -> a functional ATen graph, backward and update included
numbers.py   learning rates and step counts: computed on the host, inputs of the program
program.py   graph -> jitted functions with donation
result.py    results that arrive when they are looked at
compiled.py  the callable: chooses the program, keeps state on the device, writes it back
"""

from headrace.bridge.step.compiled import CompiledStep, compile_step

__all__ = ["CompiledStep", "compile_step"]
