"""Identities of namespaces, fingerprints of weights, and the adoption of another engine release's
namespace.

Adoption uses the content of a namespace whose identity differs in the release alone, after a
comparison of bytes has proven it valid: ``canary`` compares, ``verdict`` records.
"""

from persistkv.storage.identity.identity import (
    MODEL_NAME,
    Identity,
    fingerprint_checkpoint,
    fingerprint_tensors,
    weight_files,
)

__all__ = [
    "MODEL_NAME",
    "Identity",
    "fingerprint_checkpoint",
    "fingerprint_tensors",
    "weight_files",
]
