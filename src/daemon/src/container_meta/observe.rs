//! What the runtime says of a container, as the annotation tells it.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Error;
use super::plan::Facts;
use crate::pods::{PodView, Wanted};
use kruise_api::container_hash;
use kruise_cri::{self as cri, ContainerDetails, ContainerState, ContainerStatus, Environment, Runtime};

/// Annotation that kubelet leaves on its containers: its hash of the spec, in hexadecimal.
const HASH: &str = "io.kubernetes.container.hash";
/// How long a command in a container may take to print its environment.
const PRINT: Duration = Duration::from_secs(3);
/// Bytes of environment that are read: a container prints what it likes, and several are asked at once.
const PRINTED: usize = 512 << 10;

/// `RUNTIME://ID` in its parts.
///
/// # Errors
/// [`Error::Id`] when it is not of that form.
pub fn parts(id: &str) -> Result<(&str, &str), Error> {
    id.split_once("://")
        .filter(|(scheme, bare)| !scheme.is_empty() && !bare.is_empty())
        .ok_or_else(|| Error::Id(id.to_owned()))
}

/// Whether a container is the Pod's own of that name. IDs come from the Pod's status, which others than kubelet
/// may be allowed to write.
pub fn belongs(status: &ContainerStatus, pod: &PodView, name: &str) -> bool {
    status.name == name && pod.owns(&status.labels)
}

/// The facts of container `id` (without scheme), or none where the runtime does not know it.
///
/// # Errors
/// When the runtime does not answer.
pub async fn facts(
    runtime: &dyn Runtime,
    pod: &PodView,
    wanted: &Wanted,
    id: &str,
    env: bool,
) -> Result<Option<Facts>, cri::Error> {
    let Some(details) = runtime.container_details(id).await? else {
        return Ok(None);
    };
    let ContainerDetails { status, environment } = details;
    if !belongs(&status, pod, &wanted.name) {
        tracing::warn!(pod = %pod.name, namespace = pod.namespace, container = wanted.name, id, "the Pod's status names a container of another Pod");
        return Ok(None);
    }
    let environment = match environment {
        // Where nothing is taken from metadata there is nothing to ask for.
        _ if !env || wanted.env.is_empty() => Some(Environment::default()),
        Some(said) => Some(said),
        None if status.state == ContainerState::Running => printed(runtime, id, wanted).await?,
        None => None,
    };
    if environment.is_none() {
        tracing::warn!(pod = %pod.name, namespace = pod.namespace, container = wanted.name, id, "neither the runtime nor the container itself says its environment");
    }
    let hash = status.annotations.get(HASH);
    Ok(Some(Facts {
        plain_hash: hash
            .and_then(|hex| u64::from_str_radix(hex, 16).ok())
            .unwrap_or_default(),
        env_hash: environment.map(|now| env_hash(wanted, &now)),
    }))
}

/// The hash of what a container has of the environment that it takes from metadata. A value that a later
/// definition hides cannot be seen; it counts as right, for a restart would not change it.
fn env_hash(wanted: &Wanted, now: &Environment) -> u64 {
    container_hash::env_hash(wanted.env.iter().map(|variable| {
        let value = if variable.hidden {
            &variable.value
        } else {
            now.get(&variable.name).unwrap_or_default()
        };
        (variable.name.as_str(), value)
    }))
}

/// What `env` prints in the container of the variables that are wanted, for runtimes that do not say; none where the
/// container has no such program, or where it prints more than is read. With `-0` values of several lines are told
/// apart; not every `env` knows it.
async fn printed(
    runtime: &dyn Runtime,
    id: &str,
    wanted: &Wanted,
) -> Result<Option<Environment>, cri::Error> {
    for (command, end) in [(&["env", "-0"][..], b'\0'), (&["env"][..], b'\n')] {
        let command: Vec<String> = command.iter().map(|&word| word.to_owned()).collect();
        match runtime.exec_sync(id, &command, PRINT, PRINTED).await {
            Ok(Some(output)) if output.exit_code == 0 => {
                return Ok(Some(variables(&output.stdout, end, wanted)));
            }
            Ok(Some(_)) => {}
            Ok(None) => return Ok(None),
            // What the runtime says of a program that is not there.
            Err(cri::Error::Refused { .. } | cri::Error::Unimplemented { .. }) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// The variables that are wanted, of an environment whose entries end so.
fn variables(printed: &[u8], end: u8, wanted: &Wanted) -> Environment {
    let names: BTreeSet<&[u8]> = wanted
        .env
        .iter()
        .map(|variable| variable.name.as_bytes())
        .collect();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let pairs = printed.split(|byte| *byte == end).filter_map(|entry| {
        let at = entry.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (entry.get(..at)?, entry.get(at + 1..)?);
        names.contains(name).then(|| (text(name), text(value)))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::Variable;

    #[test]
    fn of_what_is_printed_only_the_wanted_variables_are_kept() {
        let wanted = Wanted {
            env: vec![Variable {
                name: "V".to_owned(),
                ..Variable::default()
            }],
            ..Wanted::default()
        };
        let read = variables(b"A=x\nV=one=1\n\xff\xff=\xff\nV=\xff\nV", b'\n', &wanted);
        assert_eq!(format!("{read:?}"), r#"{"V"}"#);
        assert_eq!(read.get("V"), Some("\u{fffd}"));
    }
}
