//! Tells the linker what a small program needs.

include!("../pack_relocations.rs");

fn main() {
    println!("cargo:rerun-if-changed=../pack_relocations.rs");
    pack_relocations();
}
