//! kruise-manager.

fn main() {}
