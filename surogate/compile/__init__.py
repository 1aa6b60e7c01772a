"""The compiler: passes over the graph, one a file, and the program that comes out."""
