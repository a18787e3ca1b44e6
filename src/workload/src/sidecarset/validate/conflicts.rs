//! Conflicts with other SidecarSets that may select the same Pods.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

use kruise_api::validation::FieldErrors;
use serde_json::{Value, json};

use super::container_names::{names, names_in_pod};
use super::metadata::base_of_canary;
use super::patch_metadata::keys;
use super::read::{as_text, items};
use super::request::Request;

/// What a SidecarSet claims for its Pods.
struct Claims<'a> {
    init_containers: HashSet<&'a str>,
    containers: HashSet<&'a str>,
    /// Names of all of them in the Pod.
    names_in_pod: HashSet<Cow<'a, str>>,
    volumes: HashMap<&'a str, &'a Value>,
    /// Annotations that it changes if they exist, each with its policy.
    annotations: HashMap<&'a str, &'a str>,
}

impl<'a> Claims<'a> {
    fn of(spec: &'a Value) -> Self {
        Self {
            init_containers: names(&spec["initContainers"]).collect(),
            containers: names(&spec["containers"]).collect(),
            names_in_pod: all_names_in_pod(spec).collect(),
            volumes: volumes(spec).collect(),
            annotations: annotations(spec).collect(),
        }
    }
}

/// The lists of containers, and whether they are init containers.
const CONTAINER_LISTS: [(&str, bool); 2] = [("initContainers", true), ("containers", false)];

fn all_names_in_pod(spec: &Value) -> impl Iterator<Item = Cow<'_, str>> {
    CONTAINER_LISTS.into_iter().flat_map(|(list, is_init)| {
        let containers = items(&spec[list]).iter();
        containers.flat_map(move |container| names_in_pod(container, is_init))
    })
}

fn volumes(spec: &Value) -> impl Iterator<Item = (&str, &Value)> {
    items(&spec["volumes"])
        .iter()
        .map(|volume| (as_text(&volume["name"]), volume))
}

fn annotations(spec: &Value) -> impl Iterator<Item = (&str, &str)> {
    let patches = items(&spec["patchPodMetadata"]).iter();
    let changing = patches.filter(|patch| patch["patchPolicy"] != "Retain");
    changing.flat_map(|patch| keys(patch).map(|key| (key, as_text(&patch["patchPolicy"]))))
}

/// A claim that another SidecarSet has too. The order is that of the errors.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Conflict<'a> {
    InitContainer(&'a str),
    Container(&'a str),
    /// The name in the Pod, of a container of the other list or with hot upgrade.
    NameInPod(Cow<'a, str>),
    Volume(&'a str),
    Annotation(&'a str),
}

/// Compares the claims of others, which may select the same Pods, with ours by name. Of several sets with one conflict,
/// the first is named.
pub(super) fn check(request: &Request, errors: &mut FieldErrors) {
    let set = request.set;
    let claims = Claims::of(&set["spec"]);
    let own_name = &set["metadata"]["name"];
    let base = base_of_canary(&set["metadata"]);
    let mut found = BTreeMap::new();
    for other in request.stored {
        let name = &other["metadata"]["name"];
        if name == own_name || base.is_some_and(|base| name == base) {
            continue;
        }
        for conflict in conflicts(&claims, &other["spec"]) {
            found.entry(conflict).or_insert(as_text(name));
        }
    }
    for (conflict, other) in found {
        report(conflict, other, errors);
    }
}

fn conflicts<'a>(ours: &Claims<'a>, theirs: &'a Value) -> impl Iterator<Item = Conflict<'a>> {
    let init_containers = names(&theirs["initContainers"])
        .filter(|name| ours.init_containers.contains(name))
        .map(Conflict::InitContainer);
    let containers = names(&theirs["containers"])
        .filter(|name| ours.containers.contains(name))
        .map(Conflict::Container);
    let names_in_pod = CONTAINER_LISTS.into_iter().flat_map(move |(list, is_init)| {
        let others = items(&theirs[list]).iter().filter(move |container| {
            let own = if is_init {
                &ours.init_containers
            } else {
                &ours.containers
            };
            !own.contains(as_text(&container["name"]))
        });
        others.flat_map(move |container| names_in_pod(container, is_init))
    });
    let names_in_pod = names_in_pod
        .filter(|name| ours.names_in_pod.contains(name))
        .map(Conflict::NameInPod);
    let volumes = volumes(theirs)
        .filter(|(name, volume)| ours.volumes.get(name).is_some_and(|own| own != volume))
        .map(|(name, _)| Conflict::Volume(name));
    let annotations = annotations(theirs)
        .filter(|(key, policy)| {
            let own = ours.annotations.get(key);
            own.is_some_and(|own| [*own, policy].contains(&"Overwrite"))
        })
        .map(|(key, _)| Conflict::Annotation(key));
    init_containers
        .chain(containers)
        .chain(names_in_pod)
        .chain(volumes)
        .chain(annotations)
}

fn report(conflict: Conflict, other: &str, errors: &mut FieldErrors) {
    let (field, name, what) = match &conflict {
        Conflict::NameInPod(name) => (
            "spec.containers",
            &**name,
            "a container has this name in the Pod, too,",
        ),
        Conflict::InitContainer(name) | Conflict::Container(name) => {
            ("spec.containers", *name, "a container of this name exists")
        }
        Conflict::Volume(name) => ("spec.volumes", *name, "a different volume of this name exists"),
        Conflict::Annotation(key) => ("spec.patchPodMetadata", *key, "this annotation is set, too,"),
    };
    errors.invalid(field, &json!(name), format_args!("{what} in SidecarSet {other}"));
}
