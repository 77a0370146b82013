"""Datasets, tokenizing and the order of prompts. Imports no torch."""

from relax.data.checks import check
from relax.data.errors import DataError
from relax.data.sources import PromptSource, open_source
from relax.data.stream import Position, Prompt, PromptReader, PromptRules, PromptStream
from relax.data.tokenize import PromptTokenizer, Tokenized, tokenize

__all__ = [
    "DataError",
    "Position",
    "Prompt",
    "PromptReader",
    "PromptRules",
    "PromptSource",
    "PromptStream",
    "PromptTokenizer",
    "Tokenized",
    "check",
    "open_source",
    "tokenize",
]
