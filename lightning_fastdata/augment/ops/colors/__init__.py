"""Operations on the colours of a pixel."""
