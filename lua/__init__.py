"""The atomic operations of Keylane, one Lua file each, shipped as package data."""
