"""Detection of weights that change while an engine runs, so that no KV meets weights that have not
computed it.

vLLM tells a tier nothing about updates of weights. Two things notice them:

1. **The parameters.** Each worker compares a sample of its parameters with the sample from its
   start, and publishes the result in a word of shared memory, which the engine's process reads. A
   worker compares before it copies KV to the primary tier, unless it has done so just before, and
   in each step in which the engine has asked for it.
2. **The calls.** The engine's process sees each ``collective_rpc``. Some methods are proof of a
   change. During and after an unknown one the engine is not sure of the weights until all workers
   have compared.

Consequences, in ``GuardedTier``: the result of a load is passed on only after a comparison that
began after the load's submission. While the engine is not sure, stores wait for the next
comparison. A change detaches the tier until a request names the new weights.
"""
