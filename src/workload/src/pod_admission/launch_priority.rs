//! Launch priorities: a barrier blocks the start of each container until those with a higher priority are ready.
//!
//! The barrier is an environment variable that refers to a key of a ConfigMap. Kubelet does not start the container
//! while the key is missing; the manager adds it.

use serde_json::{Value, json};

use kruise_api::json::{append, set};
use kruise_api::keys;

/// Characters at the end of a generated name.
const GENERATED_CHARS: usize = 5;
/// Longest prefix of a generated name, as the API server cuts it.
const MAX_GENERATE_NAME: usize = 63 - GENERATED_CHARS;
/// Letters and digits of generated names: those of Kubernetes, which form no words.
const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";

/// Why a Pod with launch priorities is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchPriorityError {
    /// The variable is not a number.
    #[error(
        "environment variable {} of container {container:?} is not an integer: {value:?}",
        keys::ENV_CONTAINER_PRIORITY
    )]
    NotAnInteger {
        /// Name of the container.
        container: String,
        /// Value of its variable.
        value: String,
    },
}

/// Name of the ConfigMap with the keys of a Pod's barriers.
#[must_use]
pub fn barrier_config_map(pod: &str) -> String {
    format!("{pod}{}", keys::BARRIER_CONFIG_MAP_SUFFIX)
}

/// The barrier key of a launch priority.
#[must_use]
pub fn barrier_key(priority: i64) -> String {
    format!("{}{priority}", keys::CONTAINER_BARRIER_PREFIX)
}

/// Adds barriers to the containers of a new Pod (raw JSON) with launch priorities. Returns whether the Pod changed.
///
/// The name of the ConfigMap contains that of the Pod. If the Pod has none yet, it gets one here, which ends in
/// characters that `random` selects.
///
/// # Errors
///
/// If a priority is not an integer.
pub fn apply(pod: &mut Value, random: [u8; GENERATED_CHARS]) -> Result<bool, LaunchPriorityError> {
    let Some(priorities) = priorities(pod)? else {
        return Ok(false);
    };
    let map = barrier_config_map(&name(pod, random));
    // A template that was copied from a running Pod has it: no barrier would be lifted.
    if let Some(annotations) = pod
        .pointer_mut("/metadata/annotations")
        .and_then(Value::as_object_mut)
    {
        annotations.remove(keys::CONTAINER_LAUNCH_COMPLETED);
    }
    let containers = pod.pointer_mut("/spec/containers").and_then(Value::as_array_mut);
    for (container, priority) in containers.into_iter().flatten().zip(priorities) {
        let key = json!({ "name": map, "key": barrier_key(priority) });
        let barrier = json!({ "name": keys::ENV_CONTAINER_BARRIER, "valueFrom": { "configMapKeyRef": key } });
        // The controller of the Pod may have set one before the sidecars were there, or it was copied from another Pod.
        if let Some(env) = container.get_mut("env").and_then(Value::as_array_mut) {
            env.retain(|v| v["name"] != keys::ENV_CONTAINER_BARRIER);
        }
        append(container, &["env"], barrier);
    }
    Ok(true)
}

/// The launch priority of each container; `None` if all may start at once.
fn priorities(pod: &Value) -> Result<Option<Vec<i64>>, LaunchPriorityError> {
    let containers = pod["spec"]["containers"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    if containers.len() <= 1 {
        return Ok(None);
    }
    if pod["metadata"]["annotations"][keys::CONTAINER_LAUNCH_PRIORITY] == keys::CONTAINER_LAUNCH_ORDERED {
        return Ok(Some((0..).map(|at: i64| -at).take(containers.len()).collect()));
    }
    let priorities: Vec<i64> = containers.iter().map(requested).collect::<Result<_, _>>()?;
    let differ = priorities.windows(2).any(|pair| pair.first() != pair.last());
    Ok(differ.then_some(priorities))
}

/// The errors of all containers, whether their priorities count or not.
pub(super) fn errors(pod: &Value) -> Vec<LaunchPriorityError> {
    let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
    containers
        .filter_map(|container| requested(container).err())
        .collect()
}

/// The priority in a container's environment, the last one of several; 0 if it has none.
pub(crate) fn requested(container: &Value) -> Result<i64, LaunchPriorityError> {
    let variables = container["env"].as_array().into_iter().flatten();
    let mut priority = 0;
    for variable in variables.filter(|v| v["name"] == keys::ENV_CONTAINER_PRIORITY) {
        let value = variable["value"].as_str().unwrap_or_default();
        priority = value.parse().map_err(|_| LaunchPriorityError::NotAnInteger {
            container: container["name"].as_str().unwrap_or_default().to_owned(),
            value: value.to_owned(),
        })?;
    }
    Ok(priority)
}

/// The Pod's name, which is generated now if the API server would do so later.
fn name(pod: &mut Value, random: [u8; GENERATED_CHARS]) -> String {
    let text = |field: &str| pod["metadata"][field].as_str().unwrap_or_default();
    let (name, prefix) = (text("name"), text("generateName"));
    if !name.is_empty() || prefix.is_empty() {
        return name.to_owned();
    }
    let prefix = prefix.get(..prefix.floor_char_boundary(MAX_GENERATE_NAME));
    let letter = |byte: u8| {
        let letter = ALPHABET.get(usize::from(byte) % ALPHABET.len());
        char::from(letter.copied().unwrap_or_default())
    };
    let mut name = prefix.unwrap_or_default().to_owned();
    name.extend(random.map(letter));
    set(pod, &["metadata", "name"], json!(name));
    name
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// The environment as Go writes it.
    fn without_empty(env: &mut Value) -> Value {
        for variable in env.as_array_mut().into_iter().flatten() {
            variable.as_object_mut().unwrap().retain(|_, value| *value != "");
        }
        env.take()
    }

    #[test]
    fn barriers_match_go() {
        let vectors = include_str!("../../../../tests/data/go/launch-priority.jsonl");
        assert_eq!(vectors.lines().count(), 90);
        for (at, line) in vectors.lines().enumerate() {
            let vector: Value = serde_json::from_str(line).unwrap();
            if vector["operation"] != "CREATE" || vector["subResource"] != "" {
                // The caller looks at the request.
                assert_eq!(vector["out"]["skip"], true);
                continue;
            }
            let mut pod = vector["pod"].clone();
            match apply(&mut pod, [0; 5]) {
                Ok(changed) => {
                    let containers = pod["spec"]["containers"].as_array_mut().unwrap();
                    let env: Vec<Value> = containers
                        .iter_mut()
                        .map(|c| without_empty(&mut c["env"]))
                        .collect();
                    assert_eq!(json!(env), vector["out"]["env"], "{}: {line}", at + 1);
                    assert_eq!(json!(!changed), vector["out"]["skip"], "{}: {line}", at + 1);
                }
                Err(_) => assert!(vector["out"]["error"].is_string(), "{}: {line}", at + 1),
            }
        }
    }

    #[test]
    fn copied_template_is_not_completed() {
        let variable = json!({ "name": "KRUISE_CONTAINER_PRIORITY", "value": "1" });
        let old = json!({ "configMapKeyRef": { "name": "q-barrier", "key": "p_1" } });
        let old = json!({ "name": keys::ENV_CONTAINER_BARRIER, "valueFrom": old });
        let mut pod = json!({
            "metadata": { "name": "p", "annotations": { "a": "b", keys::CONTAINER_LAUNCH_COMPLETED: "true" } },
            "spec": { "containers": [{ "name": "a", "env": [variable, old] }, { "name": "b" }] },
        });
        assert_eq!(apply(&mut pod, [0; 5]), Ok(true));
        assert_eq!(pod["metadata"]["annotations"], json!({ "a": "b" }));
        let env = pod["spec"]["containers"][0]["env"].as_array().unwrap();
        let maps: Vec<_> = env
            .iter()
            .filter_map(|v| v["valueFrom"]["configMapKeyRef"]["name"].as_str())
            .collect();
        assert_eq!(maps, ["p-barrier"]);
    }

    #[test]
    fn name_is_generated_only_for_barriers() {
        let mut pod = json!({
            "metadata": { "generateName": format!("{}-", "w".repeat(70)) },
            "spec": { "containers": [
                { "name": "a", "env": [{ "name": "KRUISE_CONTAINER_PRIORITY", "value": "-1" }] },
                { "name": "b" },
            ] },
        });
        let mut without = pod.clone();
        set(&mut without, &["spec", "containers"], json!([{}, {}]));
        assert_eq!(apply(&mut without, [1; 5]), Ok(false));
        assert_eq!(without["metadata"]["name"], Value::Null);

        assert_eq!(apply(&mut pod, [0, 1, 26, 27, 255]), Ok(true));
        let name = format!("{}bc9bq", "w".repeat(58));
        assert_eq!(pod["metadata"]["name"], json!(name));
        let key = |at: usize| &pod["spec"]["containers"][at]["env"];
        assert_eq!(
            key(1)[0]["valueFrom"]["configMapKeyRef"],
            json!({ "name": format!("{name}-barrier"), "key": "p_0" })
        );
        assert_eq!(crate::in_place::priority(&pod["spec"]["containers"][0]), Some(-1));
    }
}
