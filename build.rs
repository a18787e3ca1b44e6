//! Generates the node control API from `proto/`, and tells the linker what small programs need.

use std::env::var;

fn main() -> std::io::Result<()> {
    // Without this, any new file of the repository would be a reason to build anew.
    println!("cargo:rerun-if-changed=proto");
    println!("cargo:rustc-env=KRUISE_COMMIT={}", commit());
    pack_relocations();
    tonic_prost_build::configure().compile_protos(&["proto/kruise/node/v1/control.proto"], &["proto"])
}

/// The commit that is built: `KRUISE_COMMIT`, or what git says. Builds for development do not ask, for each commit would
/// be a reason to build again.
fn commit() -> String {
    println!("cargo:rerun-if-env-changed=KRUISE_COMMIT");
    let given = var("KRUISE_COMMIT").ok().filter(|commit| plain(commit));
    let of_git = || {
        if var("PROFILE").as_deref() != Ok("release") {
            return None;
        }
        let git = |args: &[&str]| {
            let out = std::process::Command::new("git").args(args).output().ok()?;
            let text = String::from_utf8(out.stdout).ok()?.trim().to_owned();
            out.status.success().then_some(text)
        };
        println!(
            "cargo:rerun-if-changed={}",
            git(&["rev-parse", "--git-path", "logs/HEAD"])?
        );
        git(&["rev-parse", "--short=12", "HEAD"]).filter(|commit| plain(commit))
    };
    given.or_else(of_git).unwrap_or_else(|| "unknown".to_owned())
}

fn plain(commit: &str) -> bool {
    !commit.is_empty() && commit.chars().all(|c| c.is_ascii_alphanumeric())
}

/// A static program moves its own pointers at the start. Packed, their list takes 0.4 MB less of the file and of memory.
fn pack_relocations() {
    let said = |name: &str| var(name).unwrap_or_default();
    let gnu = said("CARGO_CFG_TARGET_ARCH") == "x86_64" && said("CARGO_CFG_TARGET_ENV") == "gnu";
    if gnu
        && said("CARGO_CFG_TARGET_FEATURE")
            .split(',')
            .any(|feature| feature == "crt-static")
    {
        println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}
