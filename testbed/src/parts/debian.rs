//! Debian packages: installed from the machine's own suite, or unpacked from another one.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use super::cache::Cache;
use crate::process::{run, run_command};

/// Installs packages of the machine's own suite.
pub fn install(packages: &[&str]) -> Result<()> {
    let mut args = vec![
        "install",
        "--yes",
        "--no-install-recommends",
        "-o",
        "DPkg::Lock::Timeout=300",
    ];
    args.extend(packages);
    let mut install = Command::new("apt-get");
    install.args(&args).env("DEBIAN_FRONTEND", "noninteractive");
    if run_command(&mut install).is_ok() {
        return Ok(());
    }
    // A new machine has no package lists, or outdated ones.
    run("apt-get", &["update"])?;
    let mut retry = Command::new("apt-get");
    run_command(retry.args(&args).env("DEBIAN_FRONTEND", "noninteractive")).map(drop)
}

/// Unpacks a package of another suite into the cache. The machine's own package lists are not changed.
pub fn unpack(cache: &Cache, suite: &str, package: &str) -> Result<()> {
    let apt = cache.root().join("apt").join(suite);
    let download_dir = apt.join("fetched");
    for dir in ["lists/partial", "cache/archives/partial", "fetched"] {
        fs::create_dir_all(apt.join(dir))?;
    }
    let list = apt.join("sources.list");
    fs::write(&list, format!("deb {} {suite} main\n", debian_mirror()?))?;
    let options = [
        format!("Dir::Etc::sourcelist={}", list.display()),
        "Dir::Etc::sourceparts=/dev/null".into(),
        format!("Dir::State::lists={}", apt.join("lists").display()),
        format!("Dir::Cache={}", apt.join("cache").display()),
        "APT::Sandbox::User=root".into(),
        "Acquire::Languages=none".into(),
    ];
    let apt_get = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command.current_dir(&download_dir);
        for option in &options {
            command.args(["-o", option]);
        }
        run_command(command.args(args))
    };
    apt_get(&["update"])?;
    apt_get(&["download", package])?;
    let archive = fs::read_dir(&download_dir)?
        .filter_map(|e| e.ok().map(|e| e.path()))
        .find(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with(&format!("{package}_")))
        })
        .with_context(|| format!("apt-get download brought no {package}"))?;
    let target = cache.debian_package_dir(suite, package);
    let partial_dir = target.with_extension("part");
    fs::remove_dir_all(&partial_dir).ok();
    fs::create_dir_all(&partial_dir)?;
    run(
        "dpkg",
        &[
            "-x",
            &archive.display().to_string(),
            &partial_dir.display().to_string(),
        ],
    )?;
    fs::rename(&partial_dir, &target).with_context(|| format!("cannot move {package} into place"))
}

/// The Debian mirror in the machine's own configuration.
fn debian_mirror() -> Result<String> {
    let targets = run(
        "apt-get",
        &["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
    )?;
    let is_debian_archive =
        |uri: &&str| !uri.contains("security") && uri.trim_end_matches('/').ends_with("debian");
    let uri = targets
        .lines()
        .find(is_debian_archive)
        .or_else(|| targets.lines().next());
    uri.map(str::to_owned)
        .context("apt has no sources: cannot tell the Debian mirror")
}
