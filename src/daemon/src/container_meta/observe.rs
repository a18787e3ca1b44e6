//! Reads from the runtime what the annotation contains.

use std::collections::BTreeSet;
use std::time::Duration;

use super::error::Error;
use super::plan::ContainerFacts;
use crate::pods::{DesiredContainer, NodePod};
use kruise_api::container_hash;
use kruise_cri::{self as cri, ContainerDetails, ContainerState, ContainerStatus, Environment, Runtime};

/// Annotation that kubelet sets on its containers: its hash of the spec, in hexadecimal.
const KUBELET_HASH_ANNOTATION: &str = "io.kubernetes.container.hash";
/// Timeout of the command in a container that prints its environment.
const PRINT_ENV_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum bytes of environment that are read: a container prints any amount, and several are read concurrently.
const MAX_ENV_OUTPUT: usize = 512 << 10;

/// Splits `RUNTIME://ID`.
///
/// # Errors
/// [`Error::InvalidContainerId`] for any other form.
pub fn split_container_id(id: &str) -> Result<(&str, &str), Error> {
    id.split_once("://")
        .filter(|(scheme, bare)| !scheme.is_empty() && !bare.is_empty())
        .ok_or_else(|| Error::InvalidContainerId(id.to_owned()))
}

/// Whether the container of that name belongs to the Pod. IDs come from the Pod's status, which other clients than
/// kubelet may be allowed to write.
pub fn belongs_to_pod(status: &ContainerStatus, pod: &NodePod, name: &str) -> bool {
    status.name == name && pod.owns_container(&status.labels)
}

/// The facts of container `id` (without scheme), or none if the runtime does not have it.
///
/// # Errors
/// When the runtime does not answer.
pub async fn read_facts(
    runtime: &dyn Runtime,
    pod: &NodePod,
    desired: &DesiredContainer,
    id: &str,
    (env_from_metadata, last_try): (bool, bool),
) -> Result<Option<ContainerFacts>, cri::Error> {
    let Some(details) = runtime.container_details(id).await? else {
        return Ok(None);
    };
    let ContainerDetails { status, environment } = details;
    if !belongs_to_pod(&status, pod, &desired.name) {
        tracing::warn!(pod = %pod.name, namespace = pod.namespace, container = desired.name, id, "the Pod's status names a container of another Pod");
        return Ok(None);
    }
    let environment = match environment {
        // Without environment from metadata there is nothing to read.
        _ if !env_from_metadata || desired.env.is_empty() => Some(Environment::default()),
        Some(environment) => Some(environment),
        None if status.state == ContainerState::Running => {
            print_environment(runtime, id, desired, last_try).await?
        }
        None => None,
    };
    if environment.is_none() {
        tracing::warn!(pod = %pod.name, namespace = pod.namespace, container = desired.name, id, "neither the runtime nor the container itself says its environment");
    }
    let hash = status.annotations.get(KUBELET_HASH_ANNOTATION);
    Ok(Some(ContainerFacts {
        plain_hash: hash
            .and_then(|hex| u64::from_str_radix(hex, 16).ok())
            .unwrap_or_default(),
        env_hash: environment.map(|now| env_hash(desired, &now)),
    }))
}

/// The hash of the container's actual environment, as far as it comes from metadata. A value that a later definition
/// overrides cannot be seen; it counts as correct, because a restart would not change it.
fn env_hash(desired: &DesiredContainer, actual: &Environment) -> u64 {
    container_hash::env_hash(desired.env.iter().map(|variable| {
        let value = if variable.shadowed {
            &variable.value
        } else {
            actual.get(&variable.name).unwrap_or_default()
        };
        (variable.name.as_str(), value)
    }))
}

/// What `env` in the container prints of the desired variables, for runtimes that do not report them; none if the
/// container has no such program or prints more than the maximum. `-0` separates values of several lines; not every
/// `env` supports it.
async fn print_environment(
    runtime: &dyn Runtime,
    id: &str,
    desired: &DesiredContainer,
    last_try: bool,
) -> Result<Option<Environment>, cri::Error> {
    for (command, terminator) in [(&["env", "-0"][..], b'\0'), (&["env"][..], b'\n')] {
        let command: Vec<String> = command.iter().map(|&word| word.to_owned()).collect();
        match runtime
            .exec_sync(id, &command, PRINT_ENV_TIMEOUT, MAX_ENV_OUTPUT)
            .await
        {
            Ok(Some(output)) if output.exit_code == 0 => {
                return Ok(Some(parse_environment(&output.stdout, terminator, desired)));
            }
            Ok(Some(_)) => {}
            Ok(None) => return Ok(None),
            // The runtime's error for a missing program.
            Err(cri::Error::Rejected { .. } | cri::Error::Unimplemented { .. }) => return Ok(None),
            // The runtime has just answered, so it is the program in the image that does not end.
            Err(cri::Error::Timeout { .. }) if last_try => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Parses the desired variables from an environment whose entries end with `terminator`.
fn parse_environment(output: &[u8], terminator: u8, desired: &DesiredContainer) -> Environment {
    let names: BTreeSet<&[u8]> = desired
        .env
        .iter()
        .map(|variable| variable.name.as_bytes())
        .collect();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let pairs = output.split(|byte| *byte == terminator).filter_map(|entry| {
        let separator = entry.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (entry.get(..separator)?, entry.get(separator + 1..)?);
        names.contains(name).then(|| (text(name), text(value)))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::EnvVar;

    #[test]
    fn only_desired_variables_are_parsed_from_env_output() {
        let desired = DesiredContainer {
            env: vec![EnvVar {
                name: "V".to_owned(),
                ..EnvVar::default()
            }],
            ..DesiredContainer::default()
        };
        let environment = parse_environment(b"A=x\nV=one=1\n\xff\xff=\xff\nV=\xff\nV", b'\n', &desired);
        assert_eq!(format!("{environment:?}"), r#"{"V"}"#);
        assert_eq!(environment.get("V"), Some("\u{fffd}"));
    }
}
