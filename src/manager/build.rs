//! Passes linker arguments for a smaller program.

include!("../pack_relocations.rs");

fn main() {
    println!("cargo:rerun-if-changed=../pack_relocations.rs");
    pack_relocations();
}
