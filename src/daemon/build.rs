//! Generates the node control API, and sets the linker options for a small program.

include!("../pack_relocations.rs");

const PROTO: &str = "../../proto";

fn main() -> std::io::Result<()> {
    println!("cargo:rerun-if-changed={PROTO}");
    println!("cargo:rerun-if-changed=../pack_relocations.rs");
    pack_relocations();
    tonic_prost_build::configure().compile_protos(
        &[format!("{PROTO}/kruise/node/v1/control.proto")],
        &[PROTO.to_owned()],
    )
}
