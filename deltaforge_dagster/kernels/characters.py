"""ASCII codes by name, for kernels, which work on bytes.

Numba compiles a module's integers as constants.
"""

from __future__ import annotations

QUOTE, BACKSLASH, SLASH = ord('"'), ord("\\"), ord("/")
COMMA, COLON, EQUALS, DOT, MINUS, PLUS = ord(","), ord(":"), ord("="), ord("."), ord("-"), ord("+")
OPEN_BRACE, CLOSE_BRACE = ord("{"), ord("}")
OPEN_BRACKET, CLOSE_BRACKET = ord("["), ord("]")
ZERO, NINE = ord("0"), ord("9")
LOWER_B, LOWER_E, LOWER_F, LOWER_N = ord("b"), ord("e"), ord("f"), ord("n")
LOWER_R, LOWER_T, LOWER_U, LOWER_X = ord("r"), ord("t"), ord("u"), ord("x")
UPPER_E, UPPER_L, UPPER_N, UPPER_U = ord("E"), ord("L"), ord("N"), ord("U")
TAB = ord("\t")
SPACE, UPPER_T, UPPER_Z = ord(" "), ord("T"), ord("Z")
