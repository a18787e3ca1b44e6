//! kruise-daemon.

fn main() {}
