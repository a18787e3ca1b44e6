//! One program of a test cluster: start, stop, kill and restart.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::sandbox::Sandbox;
use crate::wait;

type Probe = Box<dyn Fn() -> bool + Send + Sync>;

/// A program in a sandbox. Drop does not end the process; the end of the sandbox does.
pub struct Component {
    name: &'static str,
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    log: PathBuf,
    sandbox: Arc<Sandbox>,
    ready: Probe,
    child: Option<Child>,
}

impl Component {
    /// Describes a program; [`Component::start`] runs it; `ready` sets its readiness probe.
    pub fn new(sandbox: &Arc<Sandbox>, name: &'static str, program: impl Into<PathBuf>) -> Self {
        Self {
            name,
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            log: sandbox.dir().join(format!("{name}.log")),
            sandbox: Arc::clone(sandbox),
            ready: Box::new(|| true),
            child: None,
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: Into<OsString>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a variable to its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.set_env(name, value);
        self
    }

    /// Adds a variable to the environment of the next start.
    pub fn set_env(&mut self, name: &str, value: impl Into<OsString>) {
        self.env.push((name.into(), value.into()));
    }

    /// Sets the readiness probe.
    #[must_use]
    pub fn ready(mut self, probe: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.ready = Box::new(probe);
        self
    }

    /// Starts it and waits until it is ready.
    pub fn start(&mut self) -> Result<()> {
        self.spawn()?;
        self.wait_ready()
    }

    /// Starts it without waiting.
    pub fn spawn(&mut self) -> Result<()> {
        if self.is_running() {
            bail!("{} is running already", self.name);
        }
        let log = fs::File::options().create(true).append(true).open(&self.log)?;
        let mut command = self.sandbox.command(&self.program);
        command.args(&self.args).envs(self.env.iter().cloned());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.child = Some(
            command
                .spawn()
                .with_context(|| format!("cannot start {}", self.program.display()))?,
        );
        Ok(())
    }

    /// Waits until it is ready. The error contains the end of its log.
    pub fn wait_ready(&mut self) -> Result<()> {
        let name = self.name;
        let outcome = wait::until(name, wait::WAIT_TIMEOUT, || {
            if !self.is_running() {
                bail!("{name} ended");
            }
            Ok((self.ready)().then_some(()))
        });
        outcome.with_context(|| format!("end of {}:\n{}", self.log.display(), tail(&self.log)))
    }

    /// Whether its process runs.
    pub fn is_running(&mut self) -> bool {
        self.child
            .as_mut()
            .is_some_and(|c| matches!(c.try_wait(), Ok(None)))
    }

    /// Its process ID on the host.
    pub fn pid(&self) -> Result<Pid> {
        let child = self
            .child
            .as_ref()
            .with_context(|| format!("{} does not run", self.name))?;
        Sandbox::inner_pid(child)
    }

    /// Suspends its process with SIGSTOP, like a machine that hangs.
    pub fn freeze(&self) -> Result<()> {
        kill(self.pid()?, Signal::SIGSTOP).with_context(|| format!("cannot stop {}", self.name))
    }

    /// Resumes it after [`Component::freeze`].
    pub fn thaw(&self) -> Result<()> {
        kill(self.pid()?, Signal::SIGCONT).with_context(|| format!("cannot continue {}", self.name))?;
        // The nsenter process that started it is suspended and resumed with it.
        let nsenter_pid = self
            .child
            .as_ref()
            .and_then(|child| i32::try_from(child.id()).ok());
        Ok(nsenter_pid.map_or(Ok(()), |pid| kill(Pid::from_raw(pid), Signal::SIGCONT))?)
    }

    /// Ends it with TERM, and with KILL after 10 s.
    pub fn stop(&mut self) -> Result<()> {
        self.signal_and_wait(Signal::SIGTERM)
    }

    /// Ends it with KILL.
    pub fn kill(&mut self) -> Result<()> {
        self.signal_and_wait(Signal::SIGKILL)
    }

    /// Stops it, then starts it.
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.start()
    }

    /// Path of the program.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The end of its output.
    pub fn tail(&self) -> String {
        tail(&self.log)
    }

    /// Path of its log file.
    pub fn log(&self) -> &Path {
        &self.log
    }

    fn signal_and_wait(&mut self, signal: Signal) -> Result<()> {
        if !self.is_running() {
            return Ok(());
        }
        let pid = self.pid()?;
        kill(pid, signal).with_context(|| format!("cannot signal {}", self.name))?;
        let exited = wait::until(self.name, Duration::from_secs(10), || {
            Ok((!self.is_running()).then_some(()))
        });
        if exited.is_err() {
            kill(pid, Signal::SIGKILL).ok();
            wait::until(self.name, Duration::from_secs(10), || {
                Ok((!self.is_running()).then_some(()))
            })?;
        }
        self.child = None;
        Ok(())
    }
}

fn tail(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}
