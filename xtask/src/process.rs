//! Running other programs to their end.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs a program to its end; its output is in the error when it fails, else returned.
pub fn run(program: &str, args: &[&str]) -> Result<String> {
    finish(Command::new(program).args(args))
}

/// Runs a command to its end; its output is in the error when it fails, else returned.
pub fn finish(command: &mut Command) -> Result<String> {
    let out = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    if !out.status.success() {
        bail!(
            "{command:?} failed ({}): {text}{}",
            out.status,
            String::from_utf8_lossy(&out.stderr)
        );
    }
    Ok(text)
}
