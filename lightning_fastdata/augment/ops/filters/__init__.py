"""Operations on the neighbourhood of a pixel."""
