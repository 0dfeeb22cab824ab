"""Programs of others that read safetensors, made to read through this package.

One file for each of them; none imports its host before it is used.
"""
