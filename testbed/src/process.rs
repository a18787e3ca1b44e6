//! Running other programs to their end.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs a program to its end; its output is in the error when it fails, else returned.
pub fn run(program: &str, args: &[&str]) -> Result<String> {
    finish(Command::new(program).args(args))
}

/// The same command, killed when the thread that starts it ends: for what must not outlive us.
pub fn ends_with_us(command: &Command) -> Command {
    let mut bound = Command::new("setpriv");
    bound.args(["--pdeathsig", "KILL"]).arg(command.get_program());
    bound.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => bound.env(name, value),
            None => bound.env_remove(name),
        };
    }
    if let Some(dir) = command.get_current_dir() {
        bound.current_dir(dir);
    }
    bound
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
