// Empty. With an assembly file in the package, the compiler accepts functions without a body, as linkname needs them.
