// Included by the build scripts of both programs.

/// A static program moves its own pointers at the start. Packed, their list takes 0.4 MB less of the file and of memory.
fn pack_relocations() {
    let var = |name: &str| std::env::var(name).unwrap_or_default();
    let gnu = var("CARGO_CFG_TARGET_ARCH") == "x86_64" && var("CARGO_CFG_TARGET_ENV") == "gnu";
    if gnu && var("CARGO_CFG_TARGET_FEATURE").split(',').any(|feature| feature == "crt-static") {
        println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}
