"""Records that the layer's parts hand each other: quantized rows, and the map that brings them to expert order."""

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Quantized rows: ``q`` (M, D) e4m3, ``scale`` (M, D // 128) e8m0, which is column-major in expert order."""

    q: Tensor
    scale: Tensor


class GroupRows(NamedTuple):
    """Tokens as one group of rows, for an FFN that serves every token.

    Attributes:
        q: (R, D) e4m3, R the number of tokens padded to a multiple of 128. None in a Saved whose
            ``arrived`` holds it.
        scale: (R, D // 128) e8m0, column-major.
        end: (1,) int32, R.
        score: (R,) fp32, by which each row of the output is multiplied, 0 for padding; or None.
    """

    q: Tensor
    scale: Tensor
    end: Tensor
    score: Tensor | None = None

    @property
    def quantized(self) -> Rows:
        return Rows(self.q, self.scale)


class Routing(NamedTuple):
    """Row map of expert order; see :func:`titan_fp8moe.recipe.expert_routing`. One group of rows has neither
    ``token_M`` nor ``row_TK``.

    Attributes:
        offsets_E: (E,) int32, end of each local expert's group, a multiple of 128.
        token_M: (M,) int32, the token of each row; -1 for padding.
        score_M: (M,) fp32, the router's score of each row; 0 for padding.
        row_TK: (T, K) int32, the row of each routed pair; -1 for a pair without one. With expert parallelism the tokens
            are the C that were dispatched to this rank. Over symmetric memory the pairs that it serves come first, and
            ``pair_CK`` of the dispatch's state says which they are.
    """

    offsets_E: Tensor
    token_M: Tensor
    score_M: Tensor
    row_TK: Tensor


class RowBias(NamedTuple):
    """The bias added to rows in expert order where a token's rows are summed: b2 of a row's expert, times its score.

    Attributes:
        b2_ED: (E, D) bf16 or fp32.
        score_M: (M,) fp32, or None for scores of 1.
        offsets_E: (E,) int32, the end of each expert's group.
    """

    b2_ED: Tensor
    score_M: Tensor | None
    offsets_E: Tensor


X, DY = range(2)
"""The rows of a layer's flags, (2, 16) uint8: of its input, and of its output's gradient. The first byte of a row is 1
if the operand held a NaN or Inf when it was quantized. A row has 16 bytes, so that both are aligned alike and Triton
compiles one kernel. :mod:`titan_fp8moe.trainer.nan_watch` makes the flags.
"""
