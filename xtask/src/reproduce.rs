//! `cargo xtask reproduce`: builds the release programs twice, from clones in two folders, and compares them.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::codegen::repository_dir;
use crate::image::{Binaries, PROGRAMS};
use testbed::cluster::run_command;

/// Folders of the clones; their lengths differ, so that a path in a program moves what follows it.
const CLONES: [&str; 2] = ["a", "another-folder"];

/// Builds the last commit twice; fails unless each program has the same bytes both times.
pub fn run() -> Result<()> {
    let dir = tempfile::Builder::new().prefix("kruise-reproduce-").tempdir()?;
    let mut builds = Vec::new();
    for name in CLONES {
        let root = dir.path().join(name);
        println!("==> Build in {}", root.display());
        clone(&root)?;
        builds.push(Binaries::build_from(&root, &root.join("target"), |_| {})?);
    }
    let [first, second] = builds.as_slice() else {
        return Ok(());
    };
    for program in PROGRAMS {
        let (a, b) = (fs::read(first.path(program))?, fs::read(second.path(program))?);
        ensure!(
            a == b,
            "{program} differs between two builds of the same commit: {}",
            difference(&a, &b)
        );
        print!(
            "{}",
            sha256(&first.path(program))?.replace(&*dir.path().to_string_lossy(), "")
        );
    }
    println!("both builds are the same");
    Ok(())
}

fn clone(root: &Path) -> Result<()> {
    let mut git = Command::new("git");
    git.args(["clone", "--quiet", "--no-hardlinks"])
        .arg(repository_dir())
        .arg(root);
    run_command(&mut git).map(drop)
}

fn sha256(path: &Path) -> Result<String> {
    run_command(Command::new("sha256sum").arg(path)).context("cannot hash the program")
}

/// Where two programs begin to differ, in words.
fn difference(a: &[u8], b: &[u8]) -> String {
    match a.iter().zip(b).position(|(a, b)| a != b) {
        Some(at) => format!("from byte {at} on, of {} and {}", a.len(), b.len()),
        None => format!("one has {} bytes, the other {}", a.len(), b.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        assert_eq!(difference(b"abc", b"axc"), "from byte 1 on, of 3 and 3");
        assert_eq!(difference(b"abc", b"abcd"), "one has 3 bytes, the other 4");
    }
}
