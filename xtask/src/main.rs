//! Entry point of `cargo xtask`.

fn main() {}
