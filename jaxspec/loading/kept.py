"""Which weights stay quantised, and how their scales follow the weights' pieces.

A weight that a model takes quantised stays so if all its pieces are stored in one scheme, and if the scales can follow what
the key map does with the weight: whole matrices can be stacked in every scheme, and rows moved where each has its own scale.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxspec.loading.stored import StoredWeight
from jaxspec.models.keymap import Piece, Pieces
from pallas_kernels.quant.schemes import Scheme


def kept_scheme(pieces: Pieces, shape: tuple[int, ...], stored: Mapping[str, StoredWeight]) -> Scheme | None:
    """The scheme of a weight [*stack, out, in] that stays quantised; None where it is dequantised."""
    schemes = {stored[piece.name].scheme if piece.name in stored else None for piece in pieces}
    (scheme, *others) = schemes
    if scheme is None or others or not all(_follows(piece, shape, scheme) for piece in pieces):
        return None
    return scheme


def _follows(piece: Piece, shape: tuple[int, ...], scheme: Scheme) -> bool:
    whole_matrix = piece.take is ... and not piece.view and not piece.order and piece.shape == shape[-2:]
    return whole_matrix or (scheme.rows == 1 and not scheme.factor and _last(piece) == shape[-1])


def _last(piece: Piece) -> int:
    """The size of what becomes the last axis: the weight's inputs, unless the piece cuts them."""
    view = piece.view or piece.shape
    return view[piece.order[-1] if piece.order else -1]


def scale_piece(piece: Piece, scheme: Scheme) -> Piece:
    """What fills the scale of a weight, seen as `Scheme.as_blocks` does, where `piece` fills the weight."""
    if scheme.rows > 1:
        return replace(piece, shape=scheme.blocks(piece.shape))
    inputs = _last(piece)
    return _with_last(piece, -(-inputs // (scheme.columns or inputs)))


def codes_piece(piece: Piece, scheme: Scheme) -> Piece:
    """What fills the codes of a weight where `piece` fills the weight."""
    return piece if scheme.packed == 1 else _with_last(piece, _last(piece) // scheme.packed)


def _with_last(piece: Piece, size: int) -> Piece:
    """The piece with another size of what becomes the last axis."""
    view = list(piece.view or piece.shape)
    view[piece.order[-1] if piece.order else -1] = size
    return replace(piece, shape=tuple(view), view=tuple(view))


def factor_piece(piece: Piece) -> Piece:
    """What fills the factor of a weight where `piece`, a whole matrix, fills the weight."""
    return replace(piece, shape=())
