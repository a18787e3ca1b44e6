//! Passes the commit that the programs are built from.

use std::env::var;

fn main() {
    println!("cargo:rustc-env=KRUISE_COMMIT={}", commit());
}

/// The commit that is built: `KRUISE_COMMIT`, or the output of git. Development builds do not call git, because each
/// commit would cause a rebuild.
fn commit() -> String {
    println!("cargo:rerun-if-env-changed=KRUISE_COMMIT");
    let given = var("KRUISE_COMMIT").ok().filter(|commit| is_valid_commit(commit));
    let from_git = || {
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
        git(&["rev-parse", "--short=12", "HEAD"]).filter(|commit| is_valid_commit(commit))
    };
    given.or_else(from_git).unwrap_or_else(|| "unknown".to_owned())
}

fn is_valid_commit(commit: &str) -> bool {
    !commit.is_empty() && commit.chars().all(|c| c.is_ascii_alphanumeric())
}
