"""Message classes that the tests of this directory send."""

import numpy as np

from relax.protocol.codec import message


@message
class Note:
    number: int
    text: str = ""


@message
class Question:
    number: int


@message
class Reply:
    number: int


@message
class Tensor:
    number: int
    values: np.ndarray
