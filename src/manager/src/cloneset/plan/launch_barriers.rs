//! Launch barriers: they block the containers of a new Pod until those of a higher launch priority are ready.
//! [`launch_priority`](crate::launch_priority) lifts them.

use serde_json::{Map, Value, json};

use crate::view::{barrier_config_map, barrier_key};
use kruise_api::json::list_items;
use kruise_api::keys;

/// Adds a barrier to each container of `spec`, if the template orders the start of its containers.
pub(super) fn add_barriers(template: &Value, pod: &str, spec: &mut Map<String, Value>) {
    let Some(priorities) = priorities(template) else {
        return;
    };
    let containers = spec.get_mut("containers").and_then(Value::as_array_mut);
    let containers = containers.into_iter().flatten().map(Value::as_object_mut);
    for (container, priority) in containers.zip(priorities) {
        let Some(container) = container else { continue };
        let mut env = list_items(container, "env").to_vec();
        env.retain(|v| v["name"] != keys::ENV_CONTAINER_BARRIER);
        let key =
            json!({ "configMapKeyRef": { "name": barrier_config_map(pod), "key": barrier_key(priority) } });
        env.push(json!({ "name": keys::ENV_CONTAINER_BARRIER, "valueFrom": key }));
        container.insert("env".to_owned(), Value::Array(env));
    }
}

/// The launch priorities of the containers; `None` if all start at once.
fn priorities(template: &Value) -> Option<Vec<i64>> {
    let containers = template["spec"]["containers"].as_array()?;
    let ordered = template["metadata"]["annotations"][keys::CONTAINER_LAUNCH_PRIORITY]
        == keys::CONTAINER_LAUNCH_ORDERED;
    let priorities: Vec<i64> = match ordered {
        true => (0..).take(containers.len()).map(|at: i64| -at).collect(),
        false => containers.iter().map(priority).collect(),
    };
    let first = priorities.first()?;
    priorities
        .iter()
        .any(|other| other != first)
        .then_some(priorities)
}

/// An invalid number is refused at admission, and counts as no priority.
fn priority(container: &Value) -> i64 {
    let env = container["env"].as_array();
    let configured = env
        .into_iter()
        .flatten()
        .find(|v| v["name"] == keys::ENV_CONTAINER_PRIORITY);
    let configured = configured.and_then(|v| v["value"].as_str()?.parse().ok());
    configured.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn template(ordered: bool, priorities: &[Option<&str>]) -> Value {
        let env = |value: &Option<&str>| {
            value.map(|v| json!([{ "name": keys::ENV_CONTAINER_PRIORITY, "value": v }]))
        };
        let containers = priorities.iter().enumerate();
        let containers = containers.map(|(at, value)| json!({ "name": format!("c{at}"), "env": env(value) }));
        let containers: Vec<Value> = containers.collect();
        let annotation = if ordered { "Ordered" } else { "Whatever" };
        json!({ "metadata": { "annotations": { (keys::CONTAINER_LAUNCH_PRIORITY): annotation } },
            "spec": { "containers": containers } })
    }

    #[test]
    fn launch_priorities_from_annotation_or_env() {
        /// Whether `Ordered` is set, the environment variable of each container, the expected priorities.
        type Case = (bool, &'static [Option<&'static str>], Option<&'static [i64]>);
        let cases: [Case; 8] = [
            (true, &[None, Some("7"), None], Some(&[0, -1, -2])),
            (true, &[None], None),
            (true, &[], None),
            (false, &[None, None], None),
            (false, &[Some("5"), Some("5")], None),
            (false, &[Some("5"), None], Some(&[5, 0])),
            (false, &[Some("-1"), Some("+3"), Some("x")], Some(&[-1, 3, 0])),
            (false, &[Some("5")], None),
        ];
        for (ordered, values, expected) in cases {
            assert_eq!(
                priorities(&template(ordered, values)).as_deref(),
                expected,
                "{values:?}"
            );
        }
    }

    #[test]
    fn launch_barrier_replaces_the_template_env() {
        let mut template = template(false, &[Some("1"), None]);
        template["spec"]["containers"][1]["env"] = json!([
            { "name": keys::ENV_CONTAINER_BARRIER, "value": "copied" }, { "name": "A", "value": "b" } ]);
        let mut spec = template["spec"].as_object().unwrap().clone();
        add_barriers(&template, "web-x", &mut spec);
        let barrier = |key: &str| {
            json!({ "name": keys::ENV_CONTAINER_BARRIER,
                "valueFrom": { "configMapKeyRef": { "name": "web-x-barrier", "key": key } } })
        };
        let env = |at: usize| spec["containers"][at]["env"].as_array().unwrap().clone();
        assert_eq!(env(0)[1], barrier("p_1"));
        assert_eq!(env(1), [json!({ "name": "A", "value": "b" }), barrier("p_0")]);
    }
}
