"""Model files: GGUF, safetensors and dummy, behind one interface; the catalogue of models we know how to fetch.

Formats never mention models, and nothing here imports torch: the front reads the tokenizer and the chat template from
the same file that the runner reads weights from.
"""

from ceiba.checkpoint.base import Checkpoint, RawTensor, TokenizerSource
from ceiba.checkpoint.opening import open_checkpoint, resolve_path

__all__ = ["Checkpoint", "RawTensor", "TokenizerSource", "open_checkpoint", "resolve_path"]
