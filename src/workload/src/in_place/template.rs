//! What an update may write into a Pod.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Map, Value, json};

use super::pod::Resources;
use super::spec::Spec;
use kruise_api::in_place::ContainerRefMetadata;
use kruise_api::keys;

/// The Pod template of a revision.
///
/// A Pod's annotations record the rest of an update by names of containers, labels and resources. The values come from
/// here: a user who may write the status of a Pod may write its annotations, and must not choose its images with that.
#[derive(Clone, Copy, Debug)]
pub struct Template<'a>(&'a Value);

impl<'a> Template<'a> {
    /// The template in the raw data of a ControllerRevision.
    #[must_use]
    pub fn from_data(data: &'a Value) -> Self {
        Self(&data["spec"]["template"])
    }

    /// The template of an unknown revision: nothing can be written.
    #[must_use]
    pub fn unknown() -> Self {
        static NONE: Value = Value::Null;
        Self(&NONE)
    }

    fn container(self, name: &str) -> Option<&'a Value> {
        let containers = self.0["spec"]["containers"].as_array()?;
        containers.iter().find(|container| container["name"] == name)
    }

    fn metadata(self, part: &str, key: &str) -> Option<&'a str> {
        self.0["metadata"][part].get(key)?.as_str()
    }

    /// The same update with this template's values. What the template lacks is left out.
    #[must_use]
    pub(super) fn with_template_values(self, mut spec: Spec) -> Spec {
        spec.container_images.retain(|name, image| {
            let own = self.container(name).and_then(|c| c["image"].as_str());
            own.is_some_and(|own| {
                own.clone_into(image);
                true
            })
        });
        spec.container_ref_metadata.retain(|_, read| {
            let ContainerRefMetadata {
                labels, annotations, ..
            } = read;
            self.restrict_to_template("labels", labels);
            self.restrict_to_template("annotations", annotations);
            !(labels.is_empty() && annotations.is_empty())
        });
        spec.container_resources.retain(|name, resources| {
            let own = self
                .container(name)
                .map(|c| Resources::from_json(&c["resources"]));
            let own = own.unwrap_or_default();
            resources.limits = template_quantities(resources.limits.take(), |name| own.limits.get(name));
            // A resource that is limited but not requested gets a request equal to its limit when the Pod is created.
            resources.requests = template_quantities(resources.requests.take(), |name| {
                own.requests.get(name).or_else(|| own.limits.get(name))
            });
            resources.limits.is_some() || resources.requests.is_some()
        });
        spec
    }

    fn restrict_to_template(self, part: &str, map: &mut BTreeMap<String, String>) {
        map.retain(|key, value| {
            !keys::OWN_POD_METADATA.contains(&key.as_str())
                && self.metadata(part, key).is_some_and(|own| {
                    own.clone_into(value);
                    true
                })
        });
    }

    /// The metadata patch with this template's values: labels, annotations and finalizers. Keys that the template lacks
    /// are removed; the keys of [`keys::OWN_POD_METADATA`] are not the template's to change.
    #[must_use]
    pub(super) fn metadata_patch(self, patch: &Value) -> Value {
        let mut metadata = Map::new();
        for part in ["labels", "annotations"] {
            if let Some(patched) = patch["metadata"][part].as_object() {
                let own = patched
                    .keys()
                    .filter(|key| !keys::OWN_POD_METADATA.contains(&key.as_str()))
                    .map(|key| (key.clone(), json!(self.metadata(part, key))));
                metadata.insert(part.to_owned(), Value::Object(own.collect()));
            }
        }
        let own = self.0["metadata"]["finalizers"].as_array().into_iter().flatten();
        let own: BTreeSet<&str> = own.filter_map(Value::as_str).collect();
        let in_template = |name: &&Value| name.as_str().is_some_and(|name| own.contains(name));
        let named = |key: &str| patch["metadata"][key].as_array().into_iter().flatten();
        let removed: Vec<&Value> = named(DELETED_FINALIZERS)
            .filter(|name| name.is_string() && !in_template(name))
            .collect();
        let added: Vec<&Value> = named("finalizers").filter(in_template).collect();
        for (key, names) in [(DELETED_FINALIZERS, removed), ("finalizers", added)] {
            if !names.is_empty() {
                metadata.insert(key.to_owned(), json!(names));
            }
        }
        json!({ "metadata": metadata })
    }
}

/// Finalizers that a strategic merge patch removes.
const DELETED_FINALIZERS: &str = "$deleteFromPrimitiveList/finalizers";

/// The named CPU and memory with other values; `None` if there are none.
fn template_quantities<'v>(
    named: Option<BTreeMap<String, Quantity>>,
    value: impl Fn(&str) -> Option<&'v String>,
) -> Option<BTreeMap<String, Quantity>> {
    let named = named.unwrap_or_default().into_keys();
    let sizes = named.filter(|name| matches!(name.as_str(), "cpu" | "memory"));
    let sizes = sizes.filter_map(|name| {
        let value = value(&name)?.clone();
        Some((name, Quantity(value)))
    });
    let sizes: BTreeMap<String, Quantity> = sizes.collect();
    (!sizes.is_empty()).then_some(sizes)
}
