//! Where our programs are.

use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;

/// Path of the daemon.
pub fn daemon() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| path("kruise-daemon"));
    &PATH
}

/// Path of the manager.
pub fn manager() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| path("kruise-manager"));
    &PATH
}

fn path(program: &str) -> String {
    // `cargo xtask test` has built them and says where they are.
    let folder = std::env::var_os("KRUISE_PROGRAMS").map_or_else(built, PathBuf::from);
    folder.join(program).display().to_string()
}

/// The folder above that of the tests, once the programs in it are of these sources: cargo builds those of other packages
/// for no test.
fn built() -> PathBuf {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        // As `cargo test` does, so that nothing is built twice.
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--workspace", "--tests", "--bins"]);
        let built = cargo.status().expect("cargo starts");
        assert!(built.success(), "the programs do not compile");
        let test = std::env::current_exe().expect("the path of this test");
        test.ancestors().nth(2).map(PathBuf::from).expect("target/debug")
    });
    FOLDER.clone()
}
