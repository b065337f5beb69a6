"""Pure array functions: each operation with its plain reference beside the fast paths."""
