//! Paths of our binaries.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use serde_json::Value;

/// Path of the daemon's binary.
pub fn daemon() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| program_path("kruise-daemon"));
    &PATH
}

/// Path of the manager's binary.
pub fn manager() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| program_path("kruise-manager"));
    &PATH
}

/// Path of the kubectl plugin's binary.
pub fn kubectl_plugin() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| program_path("kubectl-kruise"));
    &PATH
}

fn program_path(program: &str) -> String {
    // `cargo xtask test` has built them and sets their folder.
    let folder = std::env::var_os("KRUISE_PROGRAMS").map(PathBuf::from);
    let path = folder.map_or_else(|| built_program(program), |folder| folder.join(program));
    assert!(path.exists(), "{} is missing", path.display());
    path.display().to_string()
}

/// The binary built from these sources: cargo builds no binaries of other packages for a test.
fn built_program(program: &str) -> PathBuf {
    static EXECUTABLES: LazyLock<Vec<PathBuf>> = LazyLock::new(build);
    let found = EXECUTABLES.iter().find(|path| path.ends_with(program));
    found.expect("cargo says where the program is").clone()
}

/// Builds all programs and tests; returns the executables.
fn build() -> Vec<PathBuf> {
    // As `cargo test` does, so that nothing is built twice; cargo's variables of this package would cause a rebuild.
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "build",
        "--quiet",
        "--workspace",
        "--tests",
        "--bins",
        "--message-format=json",
    ]);
    let is_package_variable = |(name, _): &(std::ffi::OsString, _)| {
        let name = name.to_string_lossy();
        name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
    };
    for (name, _) in std::env::vars_os().filter(is_package_variable) {
        cargo.env_remove(name);
    }
    let output = cargo.stderr(Stdio::inherit()).output().expect("cargo starts");
    assert!(output.status.success(), "the programs do not compile");
    let lines = String::from_utf8_lossy(&output.stdout);
    let artifacts = lines
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    artifacts
        .filter_map(|artifact| artifact["executable"].as_str().map(PathBuf::from))
        .collect()
}
