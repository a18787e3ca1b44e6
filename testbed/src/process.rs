//! Runs other programs and waits for them to exit.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs a program, waits for its exit and returns its output. If it fails, the error contains the output.
pub fn run(program: &str, args: &[&str]) -> Result<String> {
    run_command(Command::new(program).args(args))
}

/// The same command, killed when the thread that starts it exits: for processes that must not outlive this one.
pub fn with_parent_death_signal(command: &Command) -> Command {
    let mut wrapped = Command::new("setpriv");
    wrapped.args(["--pdeathsig", "KILL"]).arg(command.get_program());
    wrapped.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(name, value),
            None => wrapped.env_remove(name),
        };
    }
    if let Some(dir) = command.get_current_dir() {
        wrapped.current_dir(dir);
    }
    wrapped
}

/// Runs a command, waits for its exit and returns its output. If it fails, the error contains the output.
pub fn run_command(command: &mut Command) -> Result<String> {
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
